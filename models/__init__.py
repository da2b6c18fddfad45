"""Reference models and data. They need torch, but nothing of gtopk."""
