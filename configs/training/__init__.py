"""Gin files, a package so that `include` finds them from any directory."""
