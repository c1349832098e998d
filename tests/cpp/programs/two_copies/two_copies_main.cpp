// Loads two copies of the core library and uses one after the other, by the C interface:
//   torchft_ext_two_copies FIRST SECOND
// Exit status 0: the first one works, before and after; the second one says what is wrong.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "torchft_ext/c.h"

namespace {

struct Copy {
  decltype(&tft_comm_create) create;
  decltype(&tft_comm_destroy) destroy;
};

template <typename Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}

bool load(const char* path, Copy& copy) {
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    return false;
  }
  copy.create = find<decltype(copy.create)>(library, "tft_comm_create");
  copy.destroy = find<decltype(copy.destroy)>(library, "tft_comm_destroy");
  return copy.create != nullptr && copy.destroy != nullptr;
}

tft_status use(const Copy& copy, tft_error& error) {
  tft_comm* comm = nullptr;
  const tft_status status = copy.create(nullptr, &comm, &error);
  copy.destroy(comm);
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  Copy first{};
  Copy second{};
  if (argc != 3 || !load(argv[1], first) || !load(argv[2], second)) return 2;
  tft_error error{};
  if (use(first, error) != TFT_OK) return 3;
  for (int again = 0; again < 2; ++again) {
    if (use(second, error) != TFT_INVALID_STATE) return 4;
    std::puts(error.message);
    if (std::strstr(error.message, "second copy") == nullptr) return 5;
    if (std::strstr(error.message, argv[1]) == nullptr) return 6;
  }
  return use(first, error) == TFT_OK ? 0 : 7;
}
