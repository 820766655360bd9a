"""The data of a job: a global order of records, and the rows of each batch that a process reads."""
