"""What every picture and table is made of: axes and marks as SVG, numbers as people read them."""
