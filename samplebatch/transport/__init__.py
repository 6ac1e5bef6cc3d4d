"""Between processes: batches handed over in shared memory."""
