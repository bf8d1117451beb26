"""What chips can do and what they cost, from files of figures with their sources."""
