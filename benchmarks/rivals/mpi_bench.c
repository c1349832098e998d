/* The operations of ft_bench over MPI, to compare with: one rank of it.
 *
 *   mpirun -np 4 ./mpi_bench OPS MIN MAX FACTOR SECONDS     OPS: "allreduce,barrier"; sizes in bytes
 *
 * Sizes, rounds, results and times are ft_bench's: items are floats, each operation is waited for
 * before the next one, of each round the slowest rank's time counts. Memory is allocated before the
 * loop. Rank 0 prints one line of JSON. Exit status 1: a result was wrong. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 5000 };

static int rank, size;
static int count; /* items of one part */
static float *in, *out;
static double times[MOST_ROUNDS];
static int first_result = 1;
static long all_wrong = 0;

static float item(int of, int i) { return (float)of + (float)(i % 7); }

static int is(const char *op, const char *name) { return strcmp(op, name) == 0; }

static int has_parts(const char *op) {
  return is(op, "allgather") || is(op, "reduce_scatter") || is(op, "gather") ||
         is(op, "scatter") || is(op, "alltoall");
}

/* Sums in place are of zeros, which stay zeros. */
static void once(const char *op) {
  const int next = (rank + 1) % size, before = (rank + size - 1) % size;
  if (is(op, "allreduce"))
    MPI_Allreduce(MPI_IN_PLACE, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (is(op, "broadcast"))
    MPI_Bcast(rank == 0 ? in : out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
  else if (is(op, "allgather"))
    MPI_Allgather(in, count, MPI_FLOAT, out, count, MPI_FLOAT, MPI_COMM_WORLD);
  else if (is(op, "reduce_scatter"))
    MPI_Reduce_scatter_block(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (is(op, "reduce"))
    MPI_Reduce(in, out, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
  else if (is(op, "gather"))
    MPI_Gather(in, count, MPI_FLOAT, out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
  else if (is(op, "scatter"))
    MPI_Scatter(in, count, MPI_FLOAT, out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
  else if (is(op, "alltoall"))
    MPI_Alltoall(in, count, MPI_FLOAT, out, count, MPI_FLOAT, MPI_COMM_WORLD);
  else if (is(op, "sendrecv"))
    MPI_Sendrecv(in, count, MPI_FLOAT, next, 0, out, count, MPI_FLOAT, before, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
  else if (is(op, "barrier"))
    MPI_Barrier(MPI_COMM_WORLD);
  else {
    fprintf(stderr, "mpi_bench: %s is none of the operations\n", op);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
}

/* What an item of the result has to be; negative: there is none here. */
static float expected(const char *op, int part, int i) {
  const float sum = (float)(size * (size - 1)) / 2 + (float)(size * (i % 7));
  if (is(op, "allreduce") || (is(op, "reduce") && rank == 0)) return sum;
  if (is(op, "reduce_scatter") && part == 0) return sum;
  if (is(op, "broadcast") && rank != 0) return item(0, i);
  if (is(op, "scatter") && part == 0) return item(0, i);
  if (is(op, "allgather") || is(op, "alltoall") || (is(op, "gather") && rank == 0))
    return item(part, i);
  if (is(op, "sendrecv")) return item((rank + size - 1) % size, i);
  return -1;
}

/* Of one more round, on all ranks. */
static long count_wrong(const char *op, int parts) {
  long wrong = 0;
  for (int i = 0; i < count * parts; ++i) out[i] = is(op, "allreduce") ? in[i] : -1;
  once(op);
  for (int i = 0; i < count * parts; ++i) {
    const float wanted = expected(op, i / count, i % count);
    if (wanted >= 0 && out[i] != wanted) ++wrong;
  }
  MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
  return wrong;
}

/* As many as fit in the time, the same on all ranks. */
static int agree_on_rounds(const char *op, double seconds) {
  const double began = MPI_Wtime();
  for (int i = 0; i < 3; ++i) once(op);
  const double each = (MPI_Wtime() - began) / 3;
  double rounds = each > 0 ? seconds / each : MOST_ROUNDS;
  rounds = rounds < 5 ? 5 : rounds > MOST_ROUNDS ? MOST_ROUNDS : rounds;
  MPI_Bcast(&rounds, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  return (int)rounds;
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static void print(const char *op, long bytes, int rounds, long wrong) {
  qsort(times, (size_t)rounds, sizeof(double), ascending);
  const double median = times[rounds / 2], p99 = times[(rounds - 1) * 99 / 100];
  printf("%s{\"op\": \"%s\", \"world\": %d, \"bytes\": %ld, \"seconds\": {\"count\": %d, "
         "\"median\": %.9f, \"p99\": %.9f, \"min\": %.9f, \"max\": %.9f}, \"wrong\": %ld}",
         first_result ? "" : ", ", op, size, bytes, rounds, median, p99 > median ? p99 : median,
         times[0], times[rounds - 1], wrong);
  first_result = 0;
}

static void measure(const char *op, long bytes, double seconds) {
  const int parts = has_parts(op) ? size : 1;
  count = (int)(bytes / (long)sizeof(float) / parts);
  if (count < 1) count = 1;
  for (int i = 0; i < count * parts; ++i) in[i] = item(rank, i % count), out[i] = 0;
  for (int i = 0; i < 3; ++i) once(op);
  const int rounds = agree_on_rounds(op, seconds);
  for (int i = 0; i < rounds; ++i) {
    const double began = MPI_Wtime();
    once(op);
    times[i] = MPI_Wtime() - began;
  }
  MPI_Allreduce(MPI_IN_PLACE, times, rounds, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  const long wrong = count_wrong(op, parts);
  all_wrong += wrong;
  if (rank == 0)
    print(op, bytes == 0 ? 0 : (long)count * parts * (long)sizeof(float), rounds, wrong);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc != 6) {
    fprintf(stderr, "usage: mpi_bench OPS MIN MAX FACTOR SECONDS\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  const long min = atol(argv[2]), max = atol(argv[3]), factor = atol(argv[4]);
  const double seconds = atof(argv[5]);
  const size_t most = (size_t)max + (size_t)size * sizeof(float);
  in = malloc(most);
  out = malloc(most);
  if (in == NULL || out == NULL || min < 1 || factor < 2) MPI_Abort(MPI_COMM_WORLD, 2);
  if (rank == 0) printf("{\"benchmark\": \"mpi_bench\", \"world\": %d, \"results\": [", size);
  for (char *op = strtok(argv[1], ","); op != NULL; op = strtok(NULL, ",")) {
    if (is(op, "barrier")) {
      measure(op, 0, seconds);
      continue;
    }
    for (long bytes = min; bytes <= max; bytes *= factor) measure(op, bytes, seconds);
  }
  if (rank == 0) printf("]}\n");
  free(in);
  free(out);
  MPI_Finalize();
  return all_wrong == 0 ? 0 : 1;
}
