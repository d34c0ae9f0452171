"""Speed against peers: the same weights on every side, the same answers or no number, all sides in turns."""
