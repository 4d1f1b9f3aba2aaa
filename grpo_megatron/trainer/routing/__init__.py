"""Which experts the routers of a pass use: replay, keep-routing, agreement."""
