"""Knowledge distillation: the loss, the teachers, the teacher's cache."""
