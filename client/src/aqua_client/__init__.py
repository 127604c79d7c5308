"""The one typed client of Aqua's coordinator."""
