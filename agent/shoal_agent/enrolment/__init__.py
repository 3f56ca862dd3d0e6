"""The device's identity: a certificate obtained, stored and renewed."""
