// The stores of torchft_ext/store.h.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "base/identity.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "torchft_ext/store.h"

namespace torchft_ext {
namespace {

class MapStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    MutexLock lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    MutexLock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  void remove(const std::string& key) override {
    MutexLock lock(mutex_);
    values_.erase(key);
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::string> values_ GUARDED_BY(mutex_);
};

[[noreturn]] void throwSystem(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// False: errno says why not.
bool writeAll(int fd, const std::string& value) {
  size_t written = 0;
  while (written < value.size()) {
    const ssize_t count = ::write(fd, value.data() + written, value.size() - written);
    if (count < 0 && errno != EINTR) return false;
    if (count > 0) written += static_cast<size_t>(count);
  }
  return true;
}

// A value is written beside its place and moved there, so that it is seen whole or not at all.
class FileStore final : public Store {
 public:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {
    std::filesystem::create_directories(directory_);
  }

  void set(const std::string& key, const std::string& value) override {
    const std::string place = placeOf(key);
    const std::string beside = place + "." + Token::random().hex();
    const UniqueFd fd(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!fd) throwSystem("cannot create " + beside);
    if (writeAll(fd.get(), value) && ::rename(beside.c_str(), place.c_str()) == 0) return;
    const int why = errno;
    ::unlink(beside.c_str());
    errno = why;
    throwSystem("cannot write " + place);
  }

  std::optional<std::string> get(const std::string& key) override {
    const std::string place = placeOf(key);
    const UniqueFd fd(::open(place.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd && errno == ENOENT) return std::nullopt;
    if (!fd) throwSystem("cannot open " + place);
    std::string value;
    std::array<char, 4096> part;
    for (;;) {
      const ssize_t count = ::read(fd.get(), part.data(), part.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throwSystem("cannot read " + place);
      if (count == 0) return value;
      value.append(part.data(), static_cast<size_t>(count));
    }
  }

  void remove(const std::string& key) override {
    const std::string place = placeOf(key);
    if (::unlink(place.c_str()) != 0 && errno != ENOENT) throwSystem("cannot remove " + place);
  }

 private:
  // Flat, whatever the key holds.
  std::string placeOf(const std::string& key) const {
    constexpr const char* kDigits = "0123456789abcdef";
    std::string name;
    for (const char letter : key) {
      const bool plain = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
                         (letter >= '0' && letter <= '9') || letter == '_' || letter == '-';
      const auto code = static_cast<unsigned char>(letter);
      name += plain ? std::string(1, letter)
                    : std::string{'%', kDigits[code >> 4U], kDigits[code & 15U]};
    }
    return directory_ + "/" + name;
  }

  const std::string directory_;
};

}  // namespace

Store::~Store() = default;

std::shared_ptr<Store> makeMemoryStore() {
  return std::make_shared<MapStore>();
}

std::shared_ptr<Store> makeFileStore(const std::string& directory) {
  return std::make_shared<FileStore>(directory);
}

}  // namespace torchft_ext
