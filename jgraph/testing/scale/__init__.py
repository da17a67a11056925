"""Simulation of training on clusters of any size, by the machines that ship."""
