"""Writers of the generated pages, and the map of the documentation that they share."""
