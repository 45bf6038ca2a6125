"""`agl serve`, `agl learn`, `agl policy`, `agl sessions` and `agl versions`."""
