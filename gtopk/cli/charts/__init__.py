"""Charts: axes and marks as SVG, and the page that reports share."""
