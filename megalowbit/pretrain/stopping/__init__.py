"""What makes a run save and end early: stop signals, and a launcher that has died."""
