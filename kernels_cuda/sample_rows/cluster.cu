// Leverage-score sampling of a split gradient's rows, as jetfire.reference.sample_rows has it: a
// cluster of blocks draws a product's rows.
//
// A thread has ROWS neighbouring rows' weights in registers. What all rows decide (the largest
// score, the level from which rows are certain, the sum of the chances before a row) each block
// finds of its own rows and sends to the others' shared memory.
#include "codes.cuh"
#include "config.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int HIGH = 14, SEGMENT = 128;  // as in jetfire.reference
constexpr uint32_t SAMPLING = 2;         // the stream of jetfire.reference.philox
constexpr int64_t ONE = 1ll << 32;       // the probability 1
static_assert((ROWS & (ROWS - 1)) == 0, "a thread's first eight rows draw from the same words");
static_assert(WARPS <= 32 && CLUSTER <= 32, "a warp adds up what they have");

struct Arguments {
  const int32_t* squares;
  const int32_t* x_squares;
  const uint64_t* seed;  // of each product
  // Of dgrad, and of wgrad.
  int32_t* rows[2];
  int32_t* counts[2];
  float* weight;
  int32_t* slots;
  int8_t* repeat;
  int32_t room[2];
  int32_t m, total;
};

struct Pair {
  int64_t first, second;
};

// Two of each, taken in turn: who writes one has met all others since they read it.
struct Shared {
  Pair of_warps[2][WARPS];
  Pair of_blocks[2][CLUSTER];
};

// --- what a cluster knows ------------------------------------------------------------------------

// The sum of a warp's numbers from 0 to 2^50.
DEVICE int64_t sum(int64_t x) {
  constexpr int LOW = 24;
  const uint32_t high = __reduce_add_sync(ALL, uint32_t(x >> LOW));
  const uint32_t low = __reduce_add_sync(ALL, uint32_t(x) & ((1u << LOW) - 1));
  return (int64_t(high) << LOW) + low;
}

DEVICE int64_t most(int64_t x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x = max(x, int64_t(__shfl_xor_sync(ALL, x, step)));
  return x;
}

DEVICE Pair sum(Pair x) { return {sum(x.first), sum(x.second)}; }
DEVICE Pair most(Pair x) { return {most(x.first), 0}; }

// Write to where a pair lies in another block of the cluster.
DEVICE void send(const Pair& to, uint32_t rank, Pair x) {
  asm volatile(
      "{\n.reg .b32 place;\n"
      "mapa.shared::cluster.u32 place, %0, %1;\n"
      "st.shared::cluster.v2.b64 [place], {%2, %3};\n}"
      ::"r"(shared_address(&to)), "r"(rank), "l"(x.first), "l"(x.second) : "memory");
}

// What each block of the cluster makes of its warps' pairs by `all`, which makes one of a warp's.
template <typename All>
DEVICE const Pair (&exchange(Shared& shared, int turn, Pair of_warp, All all))[CLUSTER] {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pair* warps = shared.of_warps[turn % 2];
  if (lane == 0) warps[warp] = of_warp;
  __syncthreads();
  if (warp == 0) {
    const Pair x = all(lane < WARPS ? warps[lane] : Pair{0, 0});
    if (lane < CLUSTER) send(shared.of_blocks[turn % 2][cluster_rank()], lane, x);
  }
  cluster_sync();
  return shared.of_blocks[turn % 2];
}

DEVICE Pair cluster_sum(Shared& shared, int turn, Pair of_thread) {
  const auto& blocks =
      exchange(shared, turn, sum(of_thread), [](Pair x) { return sum(x); });
  Pair found = {0, 0};
#pragma unroll
  for (const Pair& x : blocks) found.first += x.first, found.second += x.second;
  return found;
}

DEVICE int64_t cluster_most(Shared& shared, int turn, int64_t of_thread) {
  const auto& blocks =
      exchange(shared, turn, most({of_thread, 0}), [](Pair x) { return most(x); });
  int64_t found = 0;
#pragma unroll
  for (const Pair& x : blocks) found = max(found, x.first);
  return found;
}

// --- chances -------------------------------------------------------------------------------------

// Of a row: c²·‖g‖², for wgrad times ‖x‖² of its token; 0 beyond the last.
DEVICE int64_t score_of(int row, bool wgrad, const Arguments& p) {
  if (row >= p.total) return 0;
  const bool high = PARTS == 2 && row < p.m;
  int64_t found = p.squares[row];
  if (wgrad) found *= p.x_squares[PARTS == 1 || high ? row : row - p.m];
  return high ? found * (HIGH * HIGH) : found;
}

// From which weight on rows are certain, and what of a smaller one is a row's chance.
struct Level {
  int32_t certain;
  double ratio;

  // In units of 2^-32.
  DEVICE int64_t chance(int32_t w, bool wgrad) const {
    if (w >= certain) return ONE;
    if (!SAMPLED || w == 0) return 0;
    const uint32_t least = wgrad ? 1u << 28 : 1;
    return max(uint32_t(__dmul_rn(double(w), ratio)), least);
  }
};

// Weights: roots of the scores in units of their largest's 2^-30, rounded up.
DEVICE void weigh(int32_t (&w)[ROWS], Shared& shared, int row0, bool wgrad, const Arguments& p) {
  double roots[ROWS];
  double largest = 1;
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const int64_t score = score_of(row0 + k, wgrad, p);
    roots[k] = SAMPLED ? __dsqrt_rn(double(score)) : double(score);
    largest = max(largest, roots[k]);
  }
  if (!SAMPLED) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) w[k] = roots[k] > 0;
    return;
  }
  // Numbers from 0 on are in the order of their bits.
  largest = __longlong_as_double(cluster_most(shared, 0, __double_as_longlong(largest)));
  const double unit = __ddiv_rn(0x1p30, largest);
#pragma unroll
  for (int k = 0; k < ROWS; ++k) w[k] = int32_t(ceil(__dmul_rn(roots[k], unit)));
}

// The level falls from round to round until no more rows reach it.
DEVICE Level fill(const int32_t (&w)[ROWS], Shared& shared, int& turn, const Arguments& p) {
  Level level = {1, 0};
  if (!SAMPLED) return level;
  Pair mine = {0, 0};  // rows that have a weight, and its sum
#pragma unroll
  for (int k = 0; k < ROWS; ++k) mine.first += w[k] > 0, mine.second += w[k];
  Pair all = cluster_sum(shared, turn++, mine);
  int64_t left = p.m;
  for (bool more = all.first > p.m; more;) {
    level.certain = int32_t(min((all.second + left - 1) / left, int64_t(0x7FFFFFFF)));
    mine = {0, 0};  // rows that are certain, and the others' sum
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const bool reached = w[k] >= level.certain;
      mine.first += reached;
      mine.second += reached ? 0 : w[k];
    }
    all = cluster_sum(shared, turn++, mine);
    more = p.m - all.first < left;
    left = p.m - all.first;
  }
  level.ratio = __ddiv_rn(double(left) * 0x1p32, double(max(all.second, int64_t(1))));
  return level;
}

// --- rows ----------------------------------------------------------------------------------------

// Random words of eight neighbours in a row.
DEVICE Words sampling_words(uint64_t seed, int row, int column) {
  const int rows[TALL] = {row, row, row, row};  // which the compiler draws once
  Words words[TALL];
  draw(words, seed, rows, column, SAMPLING);
  return words[0];
}

// The sixteen bits of one of them.
DEVICE uint32_t bits_of(const Words& words, int column) {
  const uint32_t first = column & 2 ? words.w[1] : words.w[0];
  const uint32_t second = column & 2 ? words.w[3] : words.w[2];
  return (column & 4 ? second : first) >> column % 2 * 16 & 0xFFFF;
}

// Sums of chances, with the offset that places all draws.
struct Sums {
  int64_t before, high, all;  // before a thread's rows, of the high part, of all rows
};

DEVICE Sums add_up(int64_t mine, int64_t high, uint32_t offset, Shared& shared, int turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t to_here = mine;  // of the warp's rows
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(ALL, to_here, step);
    if (lane >= step) to_here += other;
  }
  const Pair of_warp = {__shfl_sync(ALL, to_here, 31), sum(high)};
  const auto& blocks = exchange(shared, turn, of_warp, [](Pair x) { return sum(x); });
  const bool earlier = lane < warp;
  Sums found = {offset + to_here - mine, offset, offset};
  found.before += sum(earlier ? shared.of_warps[turn % 2][lane].first : 0);
  const int rank = cluster_rank();
#pragma unroll
  for (int i = 0; i < CLUSTER; ++i) {
    if (i < rank) found.before += blocks[i].first;
    found.high += blocks[i].second;
    found.all += blocks[i].first;
  }
  return found;
}

// Where kept rows go: numbers of them in order, each part's padded to whole segments.
struct Places {
  int high, shift, end;  // the high part's last, what pads it, and where all end

  DEVICE explicit Places(const Sums& sums)
      : high(PARTS == 2 ? int(sums.high >> 32) : 0), shift(-high & (SEGMENT - 1)),
        end(int(sums.all >> 32) + shift) {}
};

// A product's outputs.
struct Drawn {
  bool wgrad;
  int32_t* rows;
  int32_t* counts;
  int32_t room;

  // An array's elements by a number are not taken from where a launch has them, but from a copy.
  DEVICE Drawn(bool wgrad, const Arguments& p)
      : wgrad(wgrad), rows(wgrad ? p.rows[1] : p.rows[0]),
        counts(wgrad ? p.counts[1] : p.counts[0]), room(wgrad ? p.room[1] : p.room[0]) {}
};

// Write what a row that has a chance counts, if it is kept, and where it is.
DEVICE void put(int row, int64_t chance, int64_t before, uint32_t bits, const Drawn& drawn,
                const Places& places, const Arguments& p) {
  const int number = int(before >> 32);
  const bool kept = int((before + chance) >> 32) > number, low = PARTS == 2 && row >= p.m;
  const int place = number + (low ? places.shift : 0);
  if (kept) {
    drawn.rows[place] = row;
    const bool high = PARTS == 2 && !low && !drawn.wgrad;
    const double counted = __ddiv_rn(high ? HIGH * 0x1p32 : 0x1p32, double(chance));
    if (drawn.wgrad) p.repeat[place] = int8_t(__dadd_rn(counted, bits * 0x1p-16));
    else p.weight[place] = float(counted);
  }
  if (drawn.wgrad) return;
  const int at = low ? 2 * (row - p.m) + 1 : 2 * row;
  p.slots[at] = kept ? place : -1;
  if (PARTS == 1) p.slots[at + 1] = -1;
}

// Write rows -1, which count nothing, from `first` to `end`.
DEVICE void pad(int first, int end, const Drawn& drawn, const Arguments& p) {
#pragma unroll 1
  for (int at = first + cluster_rank() * THREADS + threadIdx.x; at < end; at += CLUSTER * THREADS) {
    drawn.rows[at] = -1;
    if (drawn.wgrad) p.repeat[at] = 0;
    else p.weight[at] = 0;
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    cluster(const Arguments p) {
  __shared__ Shared shared;
  const bool wgrad = BOTH ? blockIdx.x / CLUSTER : WGRAD;
  const int row0 = (cluster_rank() * THREADS + threadIdx.x) * ROWS;
  cluster_sync();  // until the others run, whose memory is written to
  int32_t w[ROWS];
  weigh(w, shared, row0, wgrad, p);
  int turn = 1;
  const Level level = fill(w, shared, turn, p);

  const uint64_t seed = p.seed[BOTH ? wgrad : 0];
  int64_t mine = 0, high = 0;
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const int64_t chance = level.chance(w[k], wgrad);
    mine += chance;
    if (row0 + k < p.m) high += chance;
  }
  const Sums sums = add_up(mine, high, sampling_words(seed, 0, 0).w[0], shared, turn);
  const Places places(sums);
  const Drawn drawn(wgrad, p);
  int64_t before = sums.before;
  Words words = {};
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const int row = row0 + k;
    if (wgrad && k % WIDE == 0) words = sampling_words(seed, 1, row);
    const int64_t chance = level.chance(w[k], wgrad);
    if (row < p.total) put(row, chance, before, bits_of(words, row), drawn, places, p);
    before += chance;
  }
  pad(places.high, places.high + places.shift, drawn, p);
  pad(places.end, drawn.room, drawn, p);
  if (row0 == 0) {
    drawn.counts[0] = places.high + places.shift;
    drawn.counts[1] = (places.end + SEGMENT - 1) & -SEGMENT;
  }
}
