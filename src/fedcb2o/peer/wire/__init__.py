"""Messages between peers: their bytes, links, server, client, and checks."""
