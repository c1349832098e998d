#include "kernel_collectives.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "kernel_link.h"
#include "kernel_reduce.h"
#include "sim_device.h"
#include "sim_types.h"

namespace torchft_ext::nccl_host {
namespace {

using Signed = int64_t;

constexpr size_t kGrain = 512;  // bytes, of the Simple protocol

// The channel's share of a collective, in elements.
struct Share {
  Signed total = 0;
  Signed first = 0;
  Signed count = 0;
  Signed chunk = 0;
};

Share shareOf(const Collective& work, int channel, size_t element) {
  const auto grain = static_cast<Signed>(kGrain / element);
  const auto first = static_cast<Signed>(work.count_first);
  const auto middle = static_cast<Signed>(work.count_middle);
  const auto last = static_cast<Signed>(work.count_last);
  const int between =
      static_cast<int>(work.last_channel) - static_cast<int>(work.first_channel) - 1;
  Share share;
  share.total = first + middle * between + last;
  if (channel == static_cast<int>(work.first_channel)) {
    share.count = first;
    share.chunk = static_cast<Signed>(work.grains_first) * grain;
  } else if (channel == static_cast<int>(work.last_channel)) {
    share.first = first + between * middle;
    share.count = last;
    share.chunk = static_cast<Signed>(work.grains_last) * grain;
  } else {
    share.first = first + (channel - static_cast<int>(work.first_channel) - 1) * middle;
    share.count = middle;
    share.chunk = static_cast<Signed>(work.grains_middle) * grain;
  }
  return share;
}

// A rank's part of a ring: slices come from the one before, are reduced with its own input, and go
// to the one after and into its output.
class RingKernel {
 public:
  RingKernel(const DeviceComm& comm, int channel, const Function& function, const Collective& work,
             Steps steps)
      : ring_(comm.channels[channel].ring),
        peers_(comm.channels[channel].peers),
        reduction_{function.op, function.type, argumentOf(work)},
        element_(sim::sizeOf(function.type)),
        steps_(steps),
        slice_(static_cast<Signed>(static_cast<size_t>(comm.buffer_bytes[kSimple]) / kSteps /
                                   element_ * steps.per_slice)),
        input_(work.input),
        output_(work.output),
        input_alive_(work.input, work.input == nullptr ? 0 : 1, "a kernel of NCCL"),
        output_alive_(work.output, work.output == nullptr ? 0 : 1, "a kernel of NCCL"),
        from_(peers_[ring_.previous]->recv[0], steps, comm.abort_flag),
        to_(peers_[ring_.next]->send[0], steps, comm.abort_flag) {}

  // Offsets are in elements; -1: not that one. `last`: the result is complete.
  struct Move {
    bool recv = false;
    bool send = false;
    Signed input = -1;
    Signed output = -1;
    bool last = false;
  };
  void move(const Move& move, Signed count) {
    count = std::max<Signed>(count, 0);
    const auto slices = static_cast<Signed>(steps_.slices);
    Signed slice = std::max((count + 16 * slices - 1) / (16 * slices) * 16, slice_ / 32);
    Signed done = 0;
    for (Signed i = 0; i < slices; ++i) {
      const Signed part = std::min(slice, count - done);
      moveSlice(move, done, static_cast<size_t>(part));
      done += part;
    }
  }
  const Ring& ring() const { return ring_; }
  bool sameMemory(Signed input, Signed output) const {
    return input_ + bytes(input) == output_ + bytes(output);
  }

 private:
  static uint64_t argumentOf(const Collective& work) {
    return work.argument_is_pointer != 0 ? loadArgument(work.argument) : work.argument;
  }
  Signed bytes(Signed elements) const { return elements * static_cast<Signed>(element_); }

  void moveSlice(const Move& move, Signed done, size_t count) {
    const size_t size = count * element_;
    const char* came = move.recv ? from_.wait(size) : nullptr;
    char* leaves = move.send ? to_.wait(size) : nullptr;
    if (count > 0) {
      values_.resize(size);
      if (move.input >= 0) {
        std::memcpy(values_.data(), input_ + bytes(move.input + done), size);
        reduction_.before(values_.data(), count);
        if (came != nullptr) reduction_.combine(values_.data(), came, count);
      } else {
        std::memcpy(values_.data(), came, size);
      }
      if (move.last) reduction_.after(values_.data(), count);
      if (leaves != nullptr) std::memcpy(leaves, values_.data(), size);
      if (move.output >= 0) std::memcpy(output_ + bytes(move.output + done), values_.data(), size);
    }
    if (move.recv) from_.post();
    if (move.send) to_.post();
  }

  const Ring& ring_;
  PeerConnections** peers_;
  const Reduction reduction_;
  const size_t element_;
  const Steps steps_;
  const Signed slice_;  // elements, at most
  const char* input_;
  char* output_;
  const sim::Pin input_alive_;
  const sim::Pin output_alive_;
  RecvLink from_;
  SendLink to_;
  std::vector<char> values_;
};

void allReduce(RingKernel& kernel, int size, const Share& share) {
  Signed chunk = share.chunk;
  const Signed loop = size * chunk;
  for (Signed done = 0; done < share.count; done += loop) {
    const Signed left = share.count - done;
    if (left < loop) {
      const Signed even = (left + size - 1) / size;
      chunk = (even + 15) / 16 * 16;  // a multiple of what NCCL aligns to, on all ranks alike
    }
    const auto part = [&](int number) {
      const Signed offset = number % size * chunk;
      return std::make_pair(share.first + done + offset, std::min(chunk, left - offset));
    };
    const int index = kernel.ring().index;
    auto [offset, count] = part(index + size - 1);
    kernel.move({.send = true, .input = offset}, count);
    for (int j = 2; j < size; ++j) {
      std::tie(offset, count) = part(index + size - j);
      kernel.move({.recv = true, .send = true, .input = offset}, count);
    }
    std::tie(offset, count) = part(index);
    kernel.move({.recv = true, .send = true, .input = offset, .output = offset, .last = true},
                count);
    for (int j = 1; j < size - 1; ++j) {
      std::tie(offset, count) = part(index + size - j);
      kernel.move({.recv = true, .send = true, .output = offset}, count);
    }
    std::tie(offset, count) = part(index + 1);
    kernel.move({.recv = true, .output = offset}, count);
  }
}

void allGather(RingKernel& kernel, int size, const Share& share) {
  const int* ranks = kernel.ring().ranks;
  for (Signed done = 0; done < share.count; done += share.chunk) {
    const Signed count = std::min(share.chunk, share.count - done);
    const Signed at = share.first + done;
    const Signed own = at + ranks[0] * share.total;
    kernel.move({.send = true, .input = at, .output = kernel.sameMemory(at, own) ? -1 : own},
                count);
    for (int j = 1; j < size - 1; ++j)
      kernel.move({.recv = true, .send = true, .output = at + ranks[size - j] * share.total},
                  count);
    kernel.move({.recv = true, .output = at + ranks[1] * share.total}, count);
  }
}

void reduceScatter(RingKernel& kernel, int size, const Share& share) {
  const int* ranks = kernel.ring().ranks;
  for (Signed done = 0; done < share.count; done += share.chunk) {
    const Signed count = std::min(share.chunk, share.count - done);
    const Signed at = share.first + done;
    kernel.move({.send = true, .input = at + ranks[size - 1] * share.total}, count);
    for (int j = 2; j < size; ++j)
      kernel.move({.recv = true, .send = true, .input = at + ranks[size - j] * share.total}, count);
    kernel.move({.recv = true, .input = at + ranks[0] * share.total, .output = at, .last = true},
                count);
  }
}

void broadcast(RingKernel& kernel, int root, const Share& share) {
  const int rank = kernel.ring().ranks[0];
  const int next = kernel.ring().ranks[1];
  for (Signed done = 0; done < share.count; done += share.chunk) {
    const Signed count = std::min(share.chunk, share.count - done);
    const Signed at = share.first + done;
    if (rank == root) {
      kernel.move({.send = true, .input = at, .output = kernel.sameMemory(at, at) ? -1 : at},
                  count);
    } else {
      kernel.move({.recv = true, .send = next != root, .output = at}, count);
    }
  }
}

void reduce(RingKernel& kernel, int size, int root, const Share& share) {
  const int rank = kernel.ring().ranks[0];
  const int previous = kernel.ring().ranks[size - 1];
  for (Signed done = 0; done < share.count; done += share.chunk) {
    const Signed count = std::min(share.chunk, share.count - done);
    const Signed at = share.first + done;
    if (previous == root) {
      kernel.move({.send = true, .input = at}, count);
    } else if (rank == root) {
      kernel.move({.recv = true, .input = at, .output = at, .last = true}, count);
    } else {
      kernel.move({.recv = true, .send = true, .input = at}, count);
    }
  }
}

// ---- transfers

size_t chunkOf(uint8_t coded) {
  const unsigned exponent = coded >> 3;
  const size_t mantissa = (coded & 7U) | (exponent != 0 ? 8U : 0U);
  return mantissa << (exponent != 0 ? exponent - 1 : 0);
}

// Which of a transfer's parts is this channel's: channels take them in the order of their reversed
// bits.
int partOf(const Transfer& work, int channel) {
  const auto delta = static_cast<unsigned>(channel - work.first_channel) & (work.channels - 1U);
  unsigned reversed = 0;
  for (unsigned bit = 1; bit < work.channels; bit <<= 1) {
    reversed = reversed << 1 | ((delta & bit) != 0 ? 1U : 0U);
  }
  return static_cast<int>(reversed);
}

struct Range {
  size_t first = 0;
  size_t last = 0;
};
Range boundsOf(size_t bytes, int parts, int part) {
  constexpr size_t kPage = 4096;
  const auto number = static_cast<size_t>(parts);
  const size_t each = ((bytes + number - 1) / number + kPage - 1) / kPage * kPage;
  const auto at = static_cast<size_t>(part);
  return {std::min(at * each, bytes), std::min((at + 1) * each, bytes)};
}

}  // namespace

void runCollective(const DeviceComm& comm, int channel, const Function& function,
                   const Collective& work) {
  const bool chunked =
      function.what != Collection::kBroadcast && function.what != Collection::kReduce;
  RingKernel kernel(comm, channel, function, work,
                    chunked ? Steps{.per_slice = 2, .slices = 2} : Steps{});
  const Share share = shareOf(work, channel, sim::sizeOf(function.type));
  const int root = static_cast<int>(work.root);
  switch (function.what) {
    case Collection::kAllReduce:
      return allReduce(kernel, comm.size, share);
    case Collection::kAllGather:
      return allGather(kernel, comm.size, share);
    case Collection::kReduceScatter:
      return reduceScatter(kernel, comm.size, share);
    case Collection::kBroadcast:
      return broadcast(kernel, root, share);
    case Collection::kReduce:
      return reduce(kernel, comm.size, root, share);
    case Collection::kTransfers:
      return;
  }
}

void runSend(const DeviceComm& comm, int channel, const Transfer& work) {
  const int part = partOf(work, channel);
  if (part >= work.send_channels) return;
  const Range range = boundsOf(work.send_bytes, work.send_channels, part);
  if (work.send_rank == comm.rank) {
    if (work.send_from != work.recv_to)
      std::memcpy(work.recv_to + range.first, work.send_from + range.first,
                  range.last - range.first);
    return;
  }
  const sim::Pin alive(work.send_from, work.send_bytes, "a send of NCCL");
  SendLink to(comm.channels[channel].peers[work.send_rank]->send[1], Steps{}, comm.abort_flag);
  size_t at = range.first;
  do {
    const size_t count = std::min(chunkOf(work.send_chunk), range.last - at);
    char* place = to.wait(count);
    std::memcpy(place, work.send_from + at, count);
    to.post();
    at += count;
  } while (at < range.last);
}

void runRecv(const DeviceComm& comm, int channel, const Transfer& work) {
  const int part = partOf(work, channel);
  if (part >= work.recv_channels || work.recv_rank == comm.rank) return;
  const Range range = boundsOf(work.recv_bytes, work.recv_channels, part);
  const sim::Pin alive(work.recv_to, work.recv_bytes, "a receive of NCCL");
  RecvLink from(comm.channels[channel].peers[work.recv_rank]->recv[1], Steps{}, comm.abort_flag);
  size_t at = range.first;
  do {
    const size_t count = std::min(chunkOf(work.recv_chunk), range.last - at);
    const char* place = from.wait(count);
    std::memcpy(work.recv_to + at, place, count);
    from.post();
    at += count;
  } while (at < range.last);
}

}  // namespace torchft_ext::nccl_host
