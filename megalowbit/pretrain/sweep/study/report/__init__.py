"""What the results of a study show, as tables, pictures, a page and a JSON file."""
