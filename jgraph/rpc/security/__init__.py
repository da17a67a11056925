"""Security: TLS, certificates, tokens, roles."""
