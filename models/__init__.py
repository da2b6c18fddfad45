"""Reference models and data, which need torch but nothing of gtopk."""
