"""Pipeline parallelism: what a model must be, schedules as data, their simulation, and the executor that runs them."""
