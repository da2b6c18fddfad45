"""Reference models and data: torch only, nothing of gtopk."""
