"""What a run will take, before it starts: memory of each rank, moment by moment, and the time of a step."""
