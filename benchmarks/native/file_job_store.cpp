#include "file_job_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace torchft_ext::bench {
namespace {

// Held by one client at a time, in whatever process.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& directory)
      : fd_(::open((directory + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (fd_ < 0 || ::flock(fd_, LOCK_EX) != 0) throw StoreError("cannot lock " + directory);
  }
  ~DirectoryLock() { ::close(fd_); }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  const int fd_;
};

class FileJobStore final : public ComparingStore {
 public:
  explicit FileJobStore(std::string directory) : directory_(std::move(directory)) {}

  void set(const std::string& key, const std::string& value) override {
    const DirectoryLock lock(directory_);
    write(key, value);
  }

  std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override {
    const DirectoryLock lock(directory_);
    std::vector<std::string> values;
    for (const std::string& key : keys) {
      values.push_back(read(key));
      if (values.back().empty()) return std::nullopt;
    }
    return values;
  }

  void remove(const std::string& key) override {
    const DirectoryLock lock(directory_);
    std::filesystem::remove(pathOf(key));
  }

  std::string compareSet(const std::string& key, const std::string& expected,
                         const std::string& desired) override {
    const DirectoryLock lock(directory_);
    std::string found = read(key);
    if (found != expected) return found.empty() ? expected : found;
    write(key, desired);
    return desired;
  }

  int64_t add(const std::string& key, int64_t amount) override {
    const DirectoryLock lock(directory_);
    const std::string found = read(key);
    const int64_t sum = (found.empty() ? 0 : std::stoll(found)) + amount;
    write(key, std::to_string(sum));
    return sum;
  }

 private:
  std::string pathOf(const std::string& key) const {
    std::string name = "value-";
    for (const char c : key) name += c == '/' ? '+' : c;
    return directory_ + "/" + name;
  }

  std::string read(const std::string& key) const {  // empty: there is none
    std::ifstream file(pathOf(key), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  void write(const std::string& key, const std::string& value) const {
    std::ofstream file(pathOf(key), std::ios::binary);
    file << value;
    if (!file.flush()) throw StoreError("cannot write " + pathOf(key));
  }

  const std::string directory_;
};

}  // namespace

ComparingStoreFactory fileJobStore(const std::string& directory) {
  std::filesystem::create_directories(directory);
  return [directory] { return std::make_unique<FileJobStore>(directory); };
}

}  // namespace torchft_ext::bench
