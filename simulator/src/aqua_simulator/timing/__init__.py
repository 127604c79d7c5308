"""How long an engine's iteration takes: profile tables in, fitted operators, seconds out."""
