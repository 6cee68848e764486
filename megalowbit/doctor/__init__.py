"""`megalowbit doctor`: what a run will meet on its hardware, before it starts."""
