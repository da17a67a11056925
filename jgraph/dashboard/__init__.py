"""Dashboard: a page, a journal and metrics of a cluster; a client like any other."""
