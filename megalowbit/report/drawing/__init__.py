"""What pages are drawn with: axes, charts, heat maps, tables, one style for light, dark, desktop, phone."""
