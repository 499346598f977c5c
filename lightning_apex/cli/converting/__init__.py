"""What a checkpoint holds, and the same checkpoint for another level or for plain torch."""
