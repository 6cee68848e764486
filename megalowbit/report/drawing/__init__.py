"""What pages are drawn with: axes, charts, heat maps, tables, a style for light and dark, desktop and phone."""
