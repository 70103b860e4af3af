// Attention, backward: the weights that the forward pass kept, or solved for again; everything on their support.
#include "attention_block.h"
#include "turns.h"

namespace tamis {
namespace {

// Key heads up to which their rows are cut into parts, each with gradients of keys and values of its own, that are then
// added in order: by the shape alone, so that sums do not depend on threads.
constexpr int64_t kBackwardParts = 8;

// Gradients of the keys or the values of one head.
struct Target {
    float* data;
    int64_t distance, dim;

    void clear(int64_t rows) const {
        for (int64_t j = 0; j < rows; j++) std::memset(data + j * distance, 0, size_t(dim) * 4);
    }
    void add(const Target& other, int64_t rows) const {
        for (int64_t j = 0; j < rows; j++)
            for (int64_t d = 0; d < dim; d += kWide)
                store(data + j * distance + d, load(data + j * distance + d) + load(other.data + j * other.distance + d));
    }
};

class Backward {
  public:
    explicit Backward(const Attention& call) : call_(call), dropout_(call) {}

    void run(int64_t b, int64_t key_head, int64_t first, int64_t last, const Cut& cut, Target d_key, Target d_value) {
        batch_ = b, d_key_ = d_key, d_value_ = d_value;
        d_key.clear(call_.keys);
        d_value.clear(call_.keys);
        block_.begin(call_, b, key_head, last - first > 1);
        for (int64_t number = first; number < last; number++) {
            block_.take(number * cut.size, std::min(cut.rows, (number + 1) * cut.size));
            block_.fetch();
            dense_.clear();
            for (size_t r = 0; r < block_.rows.size(); r++)
                if (block_.weights[r].dense && Block::is_finite(grad(r), call_.value_dim))
                    dense_.push_back(r);
                else
                    sparse_row(r);
            if (!dense_.empty()) dense_rows();
        }
    }

  private:
    const Attention& call_;
    Dropout dropout_;
    Block block_;
    int64_t batch_ = 0;
    Target d_key_{}, d_value_{};
    std::vector<size_t> dense_;
    std::vector<const float*> a_;
    std::vector<float*> c_;
    Scratch<float> products_, slopes_, dropped_, grads_, queries_;

    const float* grad(size_t r) const { return call_.grad.at(batch_, block_.rows[r].head, block_.rows[r].query); }

    void sparse_row(size_t r) {
        const QueryRow& row = block_.rows[r];
        const Support support = block_.support(r);
        float* products = products_.take(support.count);
        project(support, block_.values, grad(r), call_.value_dim, products);
        Support dropped = support;
        if (dropout_.is_on()) {
            dropout_.begin(batch_, row.head, row.query);
            float* changed = dropped_.take(support.count);
            for (int64_t j = 0; j < support.count; j++) {
                const float factor = dropout_.factor(support.keys[j]);
                changed[j] = support.weights[j] * factor;
                products[j] *= factor;
            }
            dropped.weights = changed;
        }
        scatter(dropped, grad(r), call_.value_dim, d_value_.data, d_value_.distance);
        differentiate(row, support.weights, products, support.count, support.keys);
        const Support change{support.keys, products, support.count};
        gather(change, block_.keys, call_.dim, call_.d_query.at(batch_, row.head, row.query), float(call_.scale));
        scatter(change, block_.query(int64_t(r)), call_.dim, d_key_.data, d_key_.distance);
    }

    void dense_rows() {
        const int64_t rows = int64_t(dense_.size()), width = block_.width(), begin = block_.begin_key();
        const int64_t depth = std::min(width, call_.keys - begin), dim = call_.dim, value_dim = call_.value_dim;
        float* grads = grads_.take(rows * value_dim);
        float* queries = queries_.take(rows * dim);
        float* products = products_.take(rows * width);
        float* weights = block_.dense_room(0);
        for (int64_t k = 0; k < rows; k++) {
            const size_t r = dense_[size_t(k)];
            std::memcpy(grads + k * value_dim, grad(r), size_t(value_dim) * 4);
            std::memcpy(queries + k * dim, block_.query(int64_t(r)), size_t(dim) * 4);
            if (size_t(k) != r) std::memmove(weights + k * width, block_.dense_room(int64_t(r)), size_t(width) * 4);
        }
        point(rows, grads, value_dim, products, width);
        for (int64_t j = 0; j < width; j += kPanel) {
            int64_t ldb;
            const float* panel = block_.values.panel((begin + j) / kPanel, ldb);
            multiply(rows, a_.data(), 1, panel, ldb, value_dim, c_.data(), std::min<int64_t>(kPanel, rounded_up(depth - j, kWide)), false);
            for (float*& c : c_) c += kPanel;
        }
        for (int64_t k = 0; k < rows; k++) dense_row(block_.rows[dense_[size_t(k)]], weights + k * width, products + k * width);

        point(rows, products, width, nullptr, 0);
        for (int64_t k = 0; k < rows; k++) {
            const QueryRow& row = block_.rows[dense_[size_t(k)]];
            c_[size_t(k)] = call_.d_query.at(batch_, row.head, row.query);
        }
        multiply(rows, a_.data(), 1, block_.keys.row(begin), block_.keys.distance(), depth, c_.data(), dim, false);
        for (float* out : c_)
            for (int64_t d = 0; d < dim; d += kWide) store(out + d, load(out + d) * float(call_.scale));

        point(depth, products, 1, d_key_.data + begin * d_key_.distance, d_key_.distance);
        multiply(depth, a_.data(), width, queries, dim, rows, c_.data(), dim, true);
        point(depth, weights, 1, d_value_.data + begin * d_value_.distance, d_value_.distance);
        multiply(depth, a_.data(), width, grads, value_dim, rows, c_.data(), value_dim, true);
    }

    void point(int64_t rows, const float* a, int64_t a_distance, float* c, int64_t c_distance) {
        a_.resize(size_t(rows));
        c_.resize(size_t(rows));
        for (int64_t k = 0; k < rows; k++) a_[size_t(k)] = a + k * a_distance, c_[size_t(k)] = c + k * c_distance;
    }

    // Products become gradients of scores; weights are dropped after that.
    void dense_row(const QueryRow& row, float* weights, float* products) {
        const int64_t before = row.first - block_.begin_key(), count = row.last - row.first;
        std::fill(products, products + before, 0.0f);
        std::fill(products + before + count, products + block_.width(), 0.0f);
        if (!dropout_.is_on()) return differentiate(row, weights + before, products + before, count, nullptr);
        dropout_.begin(batch_, row.head, row.query);
        float* factors = dropped_.take(count);
        for (int64_t j = 0; j < count; j++) factors[j] = dropout_.factor(row.first + j);
        for (int64_t j = 0; j < count; j++) products[before + j] *= factors[j];
        differentiate(row, weights + before, products + before, count, nullptr);
        for (int64_t j = 0; j < count; j++) weights[before + j] *= factors[j];
    }

    // In place: gradients of weights become gradients of scores.  Without `keys` they are those from row.first on.
    void differentiate(const QueryRow& row, const float* weights, float* grads, int64_t count, const int32_t* keys) {
        float* slopes = slopes_.take(count);
        const FloatVec factor = all(row.factor), zero{};
        switch (call_.rule) {
            case kEntmax:
                with_slope<float>(row.e, [&](auto slope) { entmax(row, slope, weights, grads, slopes, count); });
                break;
            case kRelu:
                each(count, [&](int64_t j) TAMIS_LAMBDA { put(grads, j, count, choose(get(weights, j, count) > zero, get(grads, j, count) * factor, zero)); });
                break;
            case kSquaredRelu:
                each(count, [&](int64_t j) TAMIS_LAMBDA {
                    const FloatVec twice = 2.0f * sqrt(get(weights, j, count) * factor);
                    put(grads, j, count, choose(get(weights, j, count) > zero, get(grads, j, count) * twice, zero));
                });
                break;
            default:
                each(count, [&](int64_t j) TAMIS_LAMBDA {
                    const FloatVec step = choose(get(weights, j, count) > zero, factor, factor * float(call_.slope));
                    put(grads, j, count, get(grads, j, count) * step);
                });
        }
        if (!call_.d_slopes) return;
        call_.d_slopes[row.number] = -moment(row, call_.rule == kEntmax ? slopes : nullptr, grads, count, keys);
    }

    template <class Slope>
    void entmax(const QueryRow& row, Slope slope, const float* weights, float* grads, float* slopes, int64_t count) {
        if (count <= kWide) return entmax_of_few(row, slope, weights, grads, slopes, count);
        float total, dot, met = 0, unused;
        add_up<float>(count, dot, total, [&](int64_t j, FloatVec& s) TAMIS_LAMBDA {
            const FloatVec p = get(weights, j, count);
            const FloatBits live = ~(p <= 0.0f);  // no number stays one
            s = choose(live, slope(p), FloatVec{});
            store(slopes + j, s);
            return choose(live, s * get(grads, j, count), FloatVec{});
        });
        const float mean = total == 0 ? 0.0f : dot / total;
        const auto change = [&](int64_t j) TAMIS_LAMBDA {
            const FloatVec s = load(slopes + j);
            const FloatVec gradient = choose(s == 0.0f, FloatVec{}, s * (get(grads, j, count) - mean));
            put(grads, j, count, gradient);
            return gradient;
        };
        if (!call_.d_e) return each(count, [&](int64_t j) TAMIS_LAMBDA { change(j); });
        add_up<float>(count, met, unused, [&](int64_t j, FloatVec& none) TAMIS_LAMBDA {
            none = FloatVec{};
            return choose(load(slopes + j) == 0.0f, FloatVec{}, all(1.0f));
        });
        // Gradients add up to 0, so kappa may be measured from any value: that of equal weights, where most would cancel.
        const FloatVec equal = met > 0 ? curvature(all(1 / met), row.e) : FloatVec{};
        float moved;
        add_up<float>(count, moved, unused, [&](int64_t j, FloatVec& none) TAMIS_LAMBDA {
            none = FloatVec{};
            return (curvature(get(weights, j, count), row.e) - equal) * change(j);
        });
        call_.d_e[row.number] = -moved;
    }

    // The same for what one vector holds, whose logarithms are taken once.
    template <class Slope>
    void entmax_of_few(const QueryRow& row, Slope slope, const float* weights, float* grads, float* slopes, int64_t count) {
        if (call_.d_e) call_.d_e[row.number] = 0;
        if (count == 0) return;
        const FloatVec p = get(weights, 0, count), g = get(grads, 0, count), zero{};
        const FloatVec log2_p = call_.d_e ? log2(max(p, all(kSmallest<float>))) : zero;
        const FloatVec s = choose(p <= 0.0f, zero, call_.d_e ? slope.of_log(p, log2_p) : slope(p));
        store(slopes, s);
        const FloatBits dead = s == 0.0f;
        const float total = sum<float>(s), dot = sum<float>(choose(dead, zero, s * g));
        const FloatVec gradient = choose(dead, zero, s * (g - (total == 0 ? 0.0f : dot / total)));
        put(grads, 0, count, gradient);
        if (!call_.d_e) return;
        const FloatVec kappa = choose(p > kSmallest<float>, curvature_of_log(log2_p * float(kLn2), row.e), zero);
        const float met = sum<float>(choose(dead, zero, all(1.0f))), all_kappa = sum<float>(choose(dead, zero, kappa));
        const FloatVec mean = all(met > 0 ? all_kappa / met : 0.0f);
        call_.d_e[row.number] = -sum<float>((kappa - mean) * gradient);
    }

    // The sum of gradients times distances.  Those of entmax, who come with the slopes of their weights, add up to 0 but for
    // the rounding of the mean that was taken off, which each has by its slope: far keys would make much of it, so it is put
    // back.
    float moment(const QueryRow& row, const float* slopes, const float* grads, int64_t count, const int32_t* keys) const {
        const int64_t* positions = call_.key_positions ? call_.key_positions + batch_ * call_.key_positions_batch : nullptr;
        double sum = 0, excess = 0, slope = 0, lever = 0;
        for (int64_t j = 0; j < count; j++) {
            const int64_t key = keys ? keys[j] : row.first + j;
            const int64_t ahead = positions ? positions[key] - row.position : key - row.origin;
            const double distance = double(std::abs(ahead));
            sum += double(grads[j]) * distance;
            if (!slopes) continue;
            excess += double(grads[j]);
            slope += double(slopes[j]);
            lever += double(slopes[j]) * distance;
        }
        return float(slope > 0 ? sum - excess * (lever / slope) : sum);
    }

    template <class Work>
    static TAMIS_INLINE void each(int64_t count, Work work) {
        for (int64_t j = 0; j < count; j += kWide) work(j);
    }
    static TAMIS_INLINE FloatVec get(const float* from, int64_t j, int64_t count) {
        return count - j < kWide ? load_some(from + j, int(count - j), 0.0f) : load(from + j);
    }
    static TAMIS_INLINE void put(float* to, int64_t j, int64_t count, FloatVec x) {
        if (count - j < kWide)
            store_some(to + j, x, int(count - j));
        else
            store(to + j, x);
    }
};

Target target(const Tensor& tensor, int64_t dim, int64_t b, int64_t h) { return {tensor.at(b, h, 0), tensor.row, dim}; }

}  // namespace

extern "C" TAMIS_PUBLIC int32_t tamis_attention_backward(const Attention* call) {
    const Cut cut(*call);
    const int64_t heads = call->batches * call->key_heads;
    if (heads == 0) return kDone;
    const int64_t parts = std::clamp<int64_t>(kBackwardParts / heads, 1, std::max<int64_t>(cut.blocks, 1));
    const int64_t dims = call->dim + call->value_dim;
    // Parts but the first of each head have room of their own.
    std::unique_ptr<float[]> room;
    try {
        room.reset(new float[size_t(heads * (parts - 1) * call->keys * dims + 1)]);
    } catch (const std::exception&) {
        return kOutOfMemory;
    }
    const auto targets = [&](int64_t head, int64_t part) -> std::pair<Target, Target> {
        const int64_t b = head / call->key_heads, h = head % call->key_heads;
        if (part == 0) return {target(call->d_key, call->dim, b, h), target(call->d_value, call->value_dim, b, h)};
        float* own = room.get() + (head * (parts - 1) + part - 1) * call->keys * dims;
        return {{own, call->dim, call->dim}, {own + call->keys * call->dim, call->value_dim, call->value_dim}};
    };
    const Status status = in_parallel_by_turns(heads * parts, [&](auto next) {
        Backward backward(*call);
        for (int64_t task; (task = next()) >= 0;) {
            const int64_t head = task / parts, part = parts - 1 - task % parts;
            const auto [d_key, d_value] = targets(head, part);
            backward.run(head / call->key_heads, head % call->key_heads, cut.blocks * part / parts,
                         cut.blocks * (part + 1) / parts, cut, d_key, d_value);
        }
    });
    if (status != kDone || parts == 1) return status;
    return in_parallel(heads, 1, [&](int64_t first, int64_t last) {
        for (int64_t head = first; head < last; head++)
            for (int64_t part = 1; part < parts; part++) {
                targets(head, 0).first.add(targets(head, part).first, call->keys);
                targets(head, 0).second.add(targets(head, part).second, call->keys);
            }
    });
}

}  // namespace tamis
