/* What nccl_join.py asks of libnccl, without a GPU. Late for `stub_looks` questions, then `stub_status`. */
#include <stddef.h>
#include <string.h>

typedef struct {
  char internal[128];
} ncclUniqueId;

typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
} ncclConfig_t;

struct communicator {
  int looks;
};

int stub_looks = 0;   /* questions that are answered with "in progress"; below 0: all */
int stub_status = 0;  /* the answer after that */
int stub_version = 22707;
int stub_aborted = 0;
int stub_world_size, stub_rank, stub_blocking;
unsigned int stub_magic, stub_config_version;
size_t stub_config_size;
char stub_id[128];
static struct communicator the_one;

int ncclGetVersion(int *version) {
  *version = stub_version;
  return 0;
}

int ncclCommInitRankConfig(void **comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  stub_world_size = nranks;
  stub_rank = rank;
  stub_blocking = config->blocking;
  stub_magic = config->magic;
  stub_config_version = config->version;
  stub_config_size = config->size;
  memcpy(stub_id, id.internal, sizeof stub_id);
  the_one.looks = stub_looks;
  *comm = &the_one;
  return stub_looks ? 7 : stub_status;
}

int ncclCommGetAsyncError(void *comm, int *state) {
  struct communicator *one = comm;
  if (one->looks > 0) one->looks--;
  *state = one->looks ? 7 : stub_status;
  return 0;
}

int ncclCommAbort(void *comm) {
  stub_aborted += comm == &the_one;
  return 0;
}

const char *ncclGetErrorString(int status) { return status == 6 ? "remote process exited" : "other"; }

void *stub_communicator(void) { return &the_one; }
