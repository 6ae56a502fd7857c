"""Work in several processes of one machine: executors, shared memory and resources."""
