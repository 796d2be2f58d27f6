"""Who moves which bytes, decided without moving any: pure, and printable."""
