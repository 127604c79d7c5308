"""Adapters for engines that people already run. Nothing is imported until it is asked for."""
