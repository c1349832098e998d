#include "host/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/fork.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace torchft_ext {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

bool fail(std::string* why, const char* what) {
  *why = std::string(what) + ": " + std::error_code(errno, std::generic_category()).message();
  return false;
}

bool refuse(std::string* why, const char* what) {
  *why = what;
  return false;
}

size_t wholePages(size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// ftruncate() beyond it would send SIGXFSZ.
bool fitsFileSizeLimit(size_t bytes) {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
         (limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur);
}

}  // namespace

SharedMemory::SharedMemory(uint8_t* base, int regions, size_t region_bytes)
    : base_(base),
      stride_(wholePages(region_bytes)),
      bytes_(static_cast<size_t>(regions) * stride_),
      region_bytes_(region_bytes),
      fork_count_(forkCount()) {}

SharedMemory::~SharedMemory() {
  if (fork_count_ == forkCount()) ::munmap(base_, bytes_);
}

std::shared_ptr<SharedMemory> SharedMemory::reserve(int regions, size_t region_bytes,
                                                    std::string* why) {
  const size_t bytes = static_cast<size_t>(regions) * wholePages(region_bytes);
  void* base =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    fail(why, "no addresses");
    return nullptr;
  }
  return std::shared_ptr<SharedMemory>(
      new SharedMemory(static_cast<uint8_t*>(base), regions, region_bytes));
}

bool SharedMemory::mapOwn(int region, std::string* why) {
  if (!fitsFileSizeLimit(region_bytes_)) return refuse(why, "the limit of file sizes (ulimit -f)");
  UniqueFd made(::memfd_create("torchft_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made) return fail(why, "memfd_create");
  if (::ftruncate(made.get(), static_cast<off_t>(region_bytes_)) != 0)
    return fail(why, "ftruncate");
  void* mapped = ::mmap(at(region), region_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                        made.get(), 0);
  if (mapped == MAP_FAILED) return fail(why, "mmap");
  if (::fcntl(made.get(), F_ADD_SEALS, kSeals) != 0) return fail(why, "F_SEAL_FUTURE_WRITE");
  if (::madvise(at(region), region_bytes_, MADV_DONTFORK) != 0) return fail(why, "MADV_DONTFORK");
  if (!populate(region, 0, 1)) return fail(why, "MADV_POPULATE_WRITE (Linux 5.14)");
  own_descriptor_ = std::move(made);
  return true;
}

// The seals first: what is sealed keeps its size.
bool SharedMemory::mapPeer(int region, UniqueFd descriptor, std::string* why) {
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0) return fail(why, "F_GET_SEALS");
  if ((seals & kSeals) != kSeals) return refuse(why, "it is not sealed");
  struct stat found {};
  struct statfs system {};
  if (::fstat(descriptor.get(), &found) != 0) return fail(why, "fstat");
  if (static_cast<size_t>(found.st_size) != region_bytes_) return refuse(why, "another size");
  if (::fstatfs(descriptor.get(), &system) != 0) return fail(why, "fstatfs");
  if (system.f_type != TMPFS_MAGIC) return refuse(why, "it is no memory of the usual kind");
  void* mapped =
      ::mmap(at(region), region_bytes_, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor.get(), 0);
  if (mapped == MAP_FAILED) return fail(why, "mmap");
  if (::madvise(at(region), region_bytes_, MADV_DONTFORK) != 0) return fail(why, "MADV_DONTFORK");
  return true;
}

bool SharedMemory::populate(int region, size_t offset, size_t bytes) const {
  const size_t page = wholePages(1);
  const size_t begin = offset / page * page;
  return ::madvise(at(region) + begin, offset + bytes - begin, MADV_POPULATE_WRITE) == 0;
}

}  // namespace torchft_ext
