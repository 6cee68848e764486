"""The schema of the DeepSpeed JSON and of our block in it; read and checked without torch or DeepSpeed."""
