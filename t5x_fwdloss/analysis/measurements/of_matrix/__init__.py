"""Measurements of a matrix: its spectrum, its traces, its diagonal, its Newton step."""
