/* Processes that sum a vector, one of which dies: the others hear who it was, and go on without it.
 *
 *   for rank in 0 1 2 3; do ./allreduce $rank 4 /tmp/meeting 2 & done; wait
 *
 * The arguments: this process's rank, the number of processes, a directory that all of them see, and
 * the rank that dies (optional). Exit status 0: the sums were right, before and after.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <torchft_ext/c.h>
#include <unistd.h>

#define COUNT 1000

static int fail(const char *what, const tft_error *error) {
  fprintf(stderr, "%s: %s\n", what, error->message);
  return 1;
}

/* Every item of every member is its rank + 1: is the sum that of all of them? */
static int sums_right(const float *values, int size) {
  for (int i = 0; i < COUNT; ++i) {
    if (values[i] != size * (size + 1) / 2) return 0;
  }
  return 1;
}

static tft_status sum(tft_comm *comm, float *values, tft_error *error) {
  for (int i = 0; i < COUNT; ++i) values[i] = tft_comm_rank(comm) + 1;
  return tft_allreduce(comm, values, COUNT, TFT_FLOAT32, TFT_SUM, 0, NULL, error);
}

int main(int argc, char **argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: %s RANK SIZE DIRECTORY [RANK THAT DIES]\n", argv[0]);
    return 2;
  }
  const int rank = atoi(argv[1]);
  const int size = atoi(argv[2]);
  const int dies = argc > 4 ? atoi(argv[4]) : -1;
  tft_error error;
  tft_store *store = NULL;
  tft_comm *comm = NULL;
  tft_options options = {0};
  options.name = "example";
  options.timeout_ms = 30000;
  if (tft_store_create_file(argv[3], &store, &error) != TFT_OK) return fail("store", &error);
  if (tft_comm_create(&options, &comm, &error) != TFT_OK) return fail("create", &error);

  if (tft_comm_configure(comm, store, "generation/0", rank, size, 0, &error) != TFT_OK)
    return fail("configure", &error);
  float values[COUNT];
  if (sum(comm, values, &error) != TFT_OK) return fail("allreduce", &error);
  if (!sums_right(values, size)) return fail("wrong sum", &error);
  printf("rank %d of %d: the sum is %g\n", rank, size, values[0]);

  if (dies >= 0) {
    /* A sum that is done here may still be under way elsewhere. After a barrier none is. */
    tft_status status = tft_barrier(comm, 0, NULL, &error);
    if (rank == dies) kill(getpid(), SIGKILL);
    if (status == TFT_OK) status = sum(comm, values, &error);
    if (status != TFT_PEER_LOST || error.rank != dies)
      return fail("expected the loss of the rank that dies", &error);
    printf("rank %d: %s\n", rank, error.message);
    const int new_rank = rank > error.rank ? rank - 1 : rank;
    if (tft_comm_configure(comm, store, "generation/1", new_rank, size - 1, 0, &error) != TFT_OK)
      return fail("configure", &error);
    if (sum(comm, values, &error) != TFT_OK) return fail("allreduce", &error);
    if (!sums_right(values, size - 1)) return fail("wrong sum", &error);
    printf("rank %d is now %d of %d: the sum is %g\n", rank, new_rank, size - 1, values[0]);
  }
  tft_comm_shutdown(comm, 0, NULL);
  tft_comm_destroy(comm);
  tft_store_destroy(store);
  return 0;
}
