"""What every picture and table is made of: axes and marks as SVG, and in the terminal."""
