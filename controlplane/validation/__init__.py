"""Fits of the latency model to public measurements, and what they leave unexplained (`phaseplane validate`)."""
