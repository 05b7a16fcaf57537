"""What a step boundary remembers: models, optimizers, registered objects, their names and history."""
