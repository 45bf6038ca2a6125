"""The gateway: whose call it is, how it is sampled, where it is forwarded, and what is recorded."""
