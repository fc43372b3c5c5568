"""Jobs of a scheduler: submitted, begun and ended inside of it, looked at, and cancelled."""
