"""Work in several processes of one machine: a process pool, shared memory, and the machine's resources."""
