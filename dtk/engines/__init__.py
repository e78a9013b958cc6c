"""Engines that start processes, restart them and place them: a module each, imported by name."""
