"""`gtopk bench wire`: what each format takes of the link, and what of the processor."""
