"""Training of the small checkpoint that ships with the package. Not imported by the package."""
