"""Tasks behind a firewall: they listen nowhere, and dial whoever would dial them."""
