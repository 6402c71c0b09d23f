"""Vectors that are pytrees like the parameters: layout, algebra, random draws."""
