/* A pretended accelerator: PyTorch's PrivateUse1 device over host memory.
 *
 * What makes it worth testing with is what it has in common with a GPU:
 *
 *   - the autograd engine starts a device thread for it;
 *   - copies between it and the host that are asked not to block have not happened when
 *     they return: they wait in a queue until something of the device runs, or somebody
 *     waits for an event or a stream.  Whoever reads too early reads old bytes, and
 *     whoever gives host memory back too early has others' bytes copied;
 *   - it has random numbers of its own;
 *   - waits of the host for it can be warned of, or be errors (set_sync_debug_mode).
 *
 * Every operator runs on the CPU (at::native::cpu_fallback), so results have the CPU's
 * bits.  One device, whose streams share one queue.
 *
 * With the stand-in of the GPU's driver (use_driver) its streams are the driver's null
 * stream too: what the driver is told on others comes before or after work here by
 * events only.  Each new tensor lies in an allocation of the driver, if it is asked to.
 */
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_set>

namespace
{

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
constexpr int             DEVICES = 2; // they share the queue and the generator
const c10::Device         DEVICE(TYPE, 0);

thread_local c10::DeviceIndex device_here = 0;
thread_local c10::StreamId    stream_here[DEVICES];

c10::Device
current()
{
    return c10::Device(TYPE, device_here);
}

// The queue.

struct Work { // a copy; without `to`, giving `from` back
    void       *to;
    const void *from;
    size_t      bytes;
};

std::mutex       queue_lock; // guards all below
std::deque<Work> queue;
uint64_t         enqueued; // work ever put into the queue
uint64_t         done;     // ... and done
uint64_t         copies;   // ... of which were copies

// The stand-in's cuStreamSynchronize, once it is used.
std::atomic<int (*)(void *)> driver_synchronize;

// The stand-in's memory, for new tensors while `used`.  All but the pointers are
// guarded by queue_lock.
struct DriverMemory {
    int (*push)(void *);
    int (*pop)(void **);
    int (*alloc)(uint64_t *, size_t);
    int (*free)(uint64_t);
    bool                       used = false;
    std::unordered_set<void *> taken;

    void *
    take(size_t bytes)
    {
        constexpr size_t block = 2 << 20; // only whole blocks can be shared
        void            *context = this;  // any will do
        uint64_t         at = 0;

        push(context);
        TORCH_CHECK(alloc(&at, (bytes + block - 1) / block * block) == 0);
        pop(&context);
        void *data = reinterpret_cast<void *>(at);
        taken.insert(data);
        return data;
    }

    void
    give_back(void *data)
    {
        void *context = this;

        if (taken.erase(data) == 0) {
            c10::free_cpu(data);
            return;
        }
        push(context);
        free(reinterpret_cast<uint64_t>(data));
        pop(&context);
    }
};

DriverMemory driver_memory;

// What the null stream has been told to wait for has happened.
void
wait_for_driver()
{
    if (auto synchronize = driver_synchronize.load()) {
        synchronize(nullptr);
    }
}

void
run_one()
{
    const Work work = queue.front();

    wait_for_driver();

    if (work.to == nullptr) {
        driver_memory.give_back(const_cast<void *>(work.from));
    } else {
        std::memcpy(work.to, work.from, work.bytes);
        copies++;
    }
    queue.pop_front();
    done++;
}

void
run_all()
{
    std::lock_guard<std::mutex> guard(queue_lock);

    wait_for_driver();
    while (!queue.empty()) {
        run_one();
    }
}

// Waits of the host.

std::atomic<int>  sync_debug_mode; // 0: none is told; 1: warnings; 2: errors
thread_local bool is_inside; // an operator of this device, whose copies are not told

struct Inside {
    bool before = is_inside;

    Inside()
    {
        is_inside = true;
    }
    ~Inside()
    {
        is_inside = before;
    }
};

// Where torch's CUDA calls warn_or_error_on_sync (c10/cuda/CUDAFunctions.cpp), and at
// waits for a device or an event, of which CUDA does not tell.
void
tell_of_wait(const std::string &call)
{
    const int mode = is_inside ? 0 : sync_debug_mode.load();

    TORCH_CHECK(mode < 2, "the host waits for the pretended device: ", call);
    if (mode == 1) {
        TORCH_WARN("the host waits for the pretended device: ", call);
    }
}

void
enqueue(void *to, const void *from, size_t bytes)
{
    std::lock_guard<std::mutex> guard(queue_lock);

    queue.push_back({to, from, bytes});
    enqueued++;
}

// Memory.

// Not before the queue has done what may still use it, as a device's allocator does.
void
give_back(void *data)
{
    std::lock_guard<std::mutex> guard(queue_lock);

    wait_for_driver();
    if (queue.empty()) {
        driver_memory.give_back(data);
    } else {
        queue.push_back({nullptr, data, 0});
        enqueued++;
    }
}

struct Allocator final : c10::Allocator {
    c10::DataPtr
    allocate(size_t bytes) override
    {
        std::lock_guard<std::mutex> guard(queue_lock);
        void                       *data = bytes == 0           ? nullptr
                                           : driver_memory.used ? driver_memory.take(bytes)
                                                                : c10::alloc_cpu(bytes);

        return {data, data, &give_back, current()};
    }

    c10::DeleterFnPtr
    raw_deleter() const override
    {
        return &give_back;
    }

    void
    copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        run_all();
        std::memcpy(to, from, bytes);
    }
};

Allocator allocator;

// Devices, streams, events.

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType
    type() const override
    {
        return TYPE;
    }
    c10::Device
    exchangeDevice(c10::Device device) const override
    {
        c10::Device before = current();

        device_here = device.index();
        return before;
    }
    c10::Device
    getDevice() const override
    {
        return current();
    }
    void
    setDevice(c10::Device device) const override
    {
        device_here = device.index();
    }
    void
    uncheckedSetDevice(c10::Device device) const noexcept override
    {
        device_here = device.index();
    }
    c10::DeviceIndex
    deviceCount() const noexcept override
    {
        return DEVICES;
    }

    c10::Stream
    getStream(c10::Device device) const override
    {
        return c10::Stream(c10::Stream::UNSAFE, device, stream_here[device.index()]);
    }
    c10::Stream
    getDefaultStream(c10::Device device) const override
    {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream
    getNewStream(c10::Device device, int) const override
    {
        static std::atomic<c10::StreamId> last{0};

        return c10::Stream(c10::Stream::UNSAFE, device, ++last);
    }
    c10::Stream
    getStreamFromGlobalPool(c10::Device device, bool) const override
    {
        return getNewStream(device, 0);
    }
    c10::Stream
    exchangeStream(c10::Stream stream) const override
    {
        c10::Stream before = getStream(stream.device());

        stream_here[stream.device_index()] = stream.id();
        return before;
    }
    bool
    queryStream(const c10::Stream &) const override
    {
        std::lock_guard<std::mutex> guard(queue_lock);

        return queue.empty();
    }
    void
    synchronizeStream(const c10::Stream &) const override
    {
        tell_of_wait("a stream's synchronize");
        run_all();
    }
    void
    synchronizeDevice(const c10::DeviceIndex) const override
    {
        tell_of_wait("a device's synchronize");
        run_all();
    }

    // An event is the amount of work that is before it.
    void
    record(void **event, const c10::Stream &, const c10::DeviceIndex,
           const c10::EventFlag) const override
    {
        std::lock_guard<std::mutex> guard(queue_lock);

        if (*event == nullptr) {
            *event = new uint64_t;
        }
        *static_cast<uint64_t *>(*event) = enqueued;
    }
    void
    block(void *, const c10::Stream &) const override
    {
    }
    bool
    queryEvent(void *event) const override // time passes: something is done
    {
        std::lock_guard<std::mutex> guard(queue_lock);
        bool happened = event == nullptr || done >= *static_cast<uint64_t *>(event);

        if (!happened) {
            run_one();
        }
        return happened;
    }
    void
    synchronizeEvent(void *event) const override
    {
        tell_of_wait("an event's synchronize");

        std::lock_guard<std::mutex> guard(queue_lock);

        while (event != nullptr && done < *static_cast<uint64_t *>(event)) {
            run_one();
        }
    }
    void
    destroyEvent(void *event, const c10::DeviceIndex) const noexcept override
    {
        delete static_cast<uint64_t *>(event);
    }
};

// Random numbers: a generator of the device, which draws as a CPU's does.

struct PretendGenerator final : c10::GeneratorImpl {
    at::Generator inner = at::detail::createCPUGenerator();

    PretendGenerator()
        : c10::GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1))
    {
    }
    void
    set_current_seed(uint64_t seed) override
    {
        inner.set_current_seed(seed);
    }
    void
    set_offset(uint64_t) override
    {
        TORCH_CHECK(false, "this generator has no offset");
    }
    uint64_t
    get_offset() const override
    {
        TORCH_CHECK(false, "this generator has no offset");
    }
    uint64_t
    current_seed() const override
    {
        return inner.current_seed();
    }
    uint64_t
    seed() override
    {
        return inner.seed();
    }
    void
    set_state(const c10::TensorImpl &state) override
    {
        inner.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl>
    get_state() const override
    {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }
    PretendGenerator *
    clone_impl() const override
    {
        auto *copy = new PretendGenerator();

        copy->inner = inner.clone();
        return copy;
    }
};

at::Generator &
default_generator()
{
    static at::Generator generator = at::make_generator<PretendGenerator>();

    return generator;
}

at::Generator
generator_or_default(const std::optional<at::Generator> &generator)
{
    const at::Generator &used = generator.has_value() && generator->defined()
                                    ? *generator
                                    : default_generator();

    return static_cast<PretendGenerator *>(used.unsafeGetGeneratorImpl())->inner;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool
    isBuilt() const override
    {
        return true;
    }
    bool
    isAvailable() const override
    {
        return true;
    }
    bool
    hasPrimaryContext(c10::DeviceIndex) const override
    {
        return true;
    }
    c10::DeviceIndex
    deviceCount() const override
    {
        return DEVICES;
    }
    c10::DeviceIndex
    getCurrentDevice() const override
    {
        return device_here;
    }
    void
    setCurrentDevice(c10::DeviceIndex index) const override
    {
        device_here = index;
    }
    c10::DeviceIndex
    exchangeDevice(c10::DeviceIndex index) const override
    {
        c10::DeviceIndex before = device_here;

        device_here = index;
        return before;
    }
    c10::DeviceIndex
    maybeExchangeDevice(c10::DeviceIndex index) const override
    {
        return exchangeDevice(index);
    }
    c10::Device
    getDeviceFromPtr(void *) const override
    {
        return DEVICE;
    }
    const at::Generator &
    getDefaultGenerator(c10::DeviceIndex) const override
    {
        return default_generator();
    }
    at::Generator
    getNewGenerator(c10::DeviceIndex) const override
    {
        return at::make_generator<PretendGenerator>();
    }
    void
    resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
    }
};

// Operators.

/* The same elements as a tensor of the CPU. */
at::Tensor
on_host(const at::Tensor &tensor)
{
    if (tensor.device().is_cpu()) {
        return tensor;
    }
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                         tensor.options().device(c10::kCPU).requires_grad(false));
}

at::Tensor
empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType>  dtype,
                    std::optional<c10::Layout>, std::optional<c10::Device> device,
                    std::optional<bool>, std::optional<c10::MemoryFormat>  format)
{
    c10::OptionalDeviceGuard guard(device);

    return at::detail::empty_generic(size, &allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor
empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
              std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
              std::optional<c10::Device>     device, std::optional<bool>)
{
    c10::OptionalDeviceGuard guard(device);

    return at::detail::empty_strided_generic(
        size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        c10::dtype_or_default(dtype));
}

at::Tensor
copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    bool same = from.dtype() == to.dtype() && from.is_contiguous() &&
                to.is_contiguous() && from.numel() == to.numel();

    if (non_blocking && same && from.device() != to.device() && from.numel() > 0) {
        enqueue(to.data_ptr(), from.data_ptr(), from.nbytes());
        return to;
    }
    if (!non_blocking && from.is_cpu() != to.is_cpu() && from.numel() > 0) {
        tell_of_wait(from.is_cpu() ? "a copy from the host" : "a copy to the host");
    }
    run_all();
    on_host(to).copy_(on_host(from));
    return to;
}

at::Tensor
copy_from_and_resize(const at::Tensor &from, const at::Tensor &to)
{
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar
local_scalar_dense(const at::Tensor &self)
{
    tell_of_wait("aten::_local_scalar_dense");
    run_all();
    return at::_local_scalar_dense(on_host(self));
}

at::Tensor &
bernoulli_(at::Tensor &self, double p, std::optional<at::Generator> generator)
{
    run_all();
    on_host(self).bernoulli_(p, generator_or_default(generator));
    return self;
}

std::tuple<at::Tensor, at::Tensor>
native_dropout(const at::Tensor &input, double p, std::optional<bool> train)
{
    if (!train.value_or(true) || p == 0) {
        return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
    }
    at::Tensor mask = at::empty_like(input).bernoulli_(1 - p);

    return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask.to(c10::kBool)};
}

// Convolutions: operators that devices other than the CPU have of their own.

at::Tensor
convolution(const at::Tensor &input, const at::Tensor &weight,
            const std::optional<at::Tensor> &bias, at::IntArrayRef stride,
            at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
            at::IntArrayRef output_padding, int64_t groups)
{
    const Inside inside;
    const auto   added =
        bias && bias->defined() ? std::optional(bias->cpu()) : std::nullopt;

    return at::convolution(input.cpu(), weight.cpu(), added, stride, padding, dilation,
                           transposed, output_padding, groups)
        .to(current());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor>
convolution_backward(const at::Tensor &gradient, const at::Tensor &input,
                     const at::Tensor &weight, at::IntArrayRef stride,
                     at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                     at::IntArrayRef output_padding, int64_t groups,
                     std::array<bool, 3> wanted)
{
    const Inside                 inside;
    const std::array<int64_t, 1> bias{gradient.size(1)};
    const auto                   all = at::convolution_backward(
                          gradient.cpu(), input.cpu(), weight.cpu(),
        wanted[2] ? at::OptionalIntArrayRef(bias) : std::nullopt, stride, padding,
                          dilation, transposed, output_padding, groups, wanted);
    const auto back = [](const at::Tensor &t) {
        return t.defined() ? t.to(current()) : t;
    };

    return {back(std::get<0>(all)), back(std::get<1>(all)), back(std::get<2>(all))};
}

// Cells of nn.LSTM and nn.GRU: operators that the CPU does not have.

bool
is_there(const std::optional<at::Tensor> &tensor)
{
    return tensor.has_value() && tensor->defined();
}

at::Tensor
with_bias(const at::Tensor &gates, const std::optional<at::Tensor> &bias)
{
    return is_there(bias) ? gates + *bias : gates;
}

at::Tensor
sum_of_rows(const at::Tensor &tensor)
{
    const std::array<int64_t, 1> rows{0};

    return tensor.sum(rows);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor>
lstm_cell(const at::Tensor &input_gates, const at::Tensor &hidden_gates,
          const at::Tensor &cx, const std::optional<at::Tensor> &input_bias,
          const std::optional<at::Tensor> &hidden_bias)
{
    auto gates =
        (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias))
            .chunk(4, 1);
    at::Tensor i = gates[0].sigmoid();
    at::Tensor f = gates[1].sigmoid();
    at::Tensor g = gates[2].tanh();
    at::Tensor o = gates[3].sigmoid();
    at::Tensor cy = f * cx + i * g;

    return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor>
lstm_cell_backward(const std::optional<at::Tensor> &grad_hy,
                   const std::optional<at::Tensor> &grad_cy, const at::Tensor &cx,
                   const at::Tensor &cy, const at::Tensor &workspace, bool has_bias)
{
    if (!is_there(grad_hy) && !is_there(grad_cy)) {
        return {};
    }
    auto              gates = workspace.chunk(4, 1);
    const at::Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
    at::Tensor        tanh_cy = cy.tanh();
    at::Tensor        hy = is_there(grad_hy) ? *grad_hy : at::zeros_like(cy);
    at::Tensor        c = hy * o * (1 - tanh_cy * tanh_cy);

    if (is_there(grad_cy)) {
        c = c + *grad_cy;
    }
    at::Tensor grad_gates = at::cat({c * g * i * (1 - i), c * cx * f * (1 - f),
                                     c * i * (1 - g * g), hy * tanh_cy * o * (1 - o)},
                                    1);

    return {grad_gates, c * f, has_bias ? sum_of_rows(grad_gates) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor>
gru_cell(const at::Tensor &input_gates, const at::Tensor &hidden_gates,
         const at::Tensor &hx, const std::optional<at::Tensor> &input_bias,
         const std::optional<at::Tensor> &hidden_bias)
{
    auto       of_input = with_bias(input_gates, input_bias).chunk(3, 1);
    auto       of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
    at::Tensor r = (of_input[0] + of_hidden[0]).sigmoid();
    at::Tensor z = (of_input[1] + of_hidden[1]).sigmoid();
    at::Tensor n = (of_input[2] + r * of_hidden[2]).tanh();

    return {n + z * (hx - n), at::cat({r, z, n, hx, of_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
gru_cell_backward(const at::Tensor &grad_hy, const at::Tensor &workspace, bool has_bias)
{
    auto              saved = workspace.chunk(5, 1);
    const at::Tensor &r = saved[0], &z = saved[1], &n = saved[2], &hx = saved[3];
    at::Tensor        at_n = grad_hy * (1 - z) * (1 - n * n);
    at::Tensor        at_z = grad_hy * (hx - n) * z * (1 - z);
    at::Tensor        at_r = at_n * saved[4] * r * (1 - r);
    at::Tensor        of_input = at::cat({at_r, at_z, at_n}, 1);
    at::Tensor        of_hidden = at::cat({at_r, at_z, at_n * r}, 1);

    return {of_input, of_hidden, grad_hy * z,
            has_bias ? sum_of_rows(of_input) : at::Tensor(),
            has_bias ? sum_of_rows(of_hidden) : at::Tensor()};
}

// Whether an index is a mask: the number of its elements depends on values.
bool
has_mask(const c10::IValue &indices)
{
    for (const c10::IValue &index : indices.toListRef()) {
        if (index.isTensor() && index.toTensor().defined() &&
            (index.toTensor().scalar_type() == c10::kBool ||
             index.toTensor().scalar_type() == c10::kByte)) {
            return true;
        }
    }
    return false;
}

// Whether the operator's result, or its shape, is known to the host from values alone.
bool
waits_for_values(const c10::OperatorHandle &op, const torch::jit::Stack &stack)
{
    const std::string &name = op.schema().name();
    const auto arguments = torch::jit::last(stack, op.schema().arguments().size());

    if (name == "aten::index") {
        return has_mask(arguments[1]);
    }
    if (name == "aten::index_put_" || name == "aten::_index_put_impl_") {
        return has_mask(arguments[1]) && arguments[2].toTensor().numel() > 1;
    }
    if (name == "aten::repeat_interleave") {
        return arguments.back().isNone(); // output_size
    }
    return name == "aten::equal" || op.hasTag(at::Tag::dynamic_output_shape) ||
           op.hasTag(at::Tag::data_dependent_output);
}

void
fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    if (sync_debug_mode.load() > 0 && waits_for_values(op, *stack)) {
        tell_of_wait(op.schema().name());
    }

    const Inside inside;

    run_all();
    at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", &empty_memory_format);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("view_as_real", &at::native::view_as_real);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("resize_", &at::native::resize_);
    m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    m.impl("set_.source_Storage", &at::native::set_);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar_dense);
    m.impl("bernoulli_.float", &bernoulli_);
    m.impl("native_dropout", &native_dropout);
    m.impl("convolution_overrideable", &convolution);
    m.impl("convolution_backward_overrideable", &convolution_backward);
    m.impl("_thnn_fused_lstm_cell", &lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    m.impl("_thnn_fused_gru_cell", &gru_cell);
    m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// What PyTorch has no generic call for.

int64_t
late_copies()
{
    std::lock_guard<std::mutex> guard(queue_lock);

    return static_cast<int64_t>(copies);
}

void
set_sync_debug_mode(int64_t mode)
{
    sync_debug_mode = static_cast<int>(mode);
}

int64_t
get_sync_debug_mode()
{
    return sync_debug_mode;
}

void
manual_seed(int64_t seed)
{
    default_generator().set_current_seed(static_cast<uint64_t>(seed));
}

at::Tensor
get_rng_state()
{
    return default_generator().get_state();
}

void
set_rng_state(const at::Tensor &state)
{
    default_generator().set_state(state);
}

// The stand-in at `path` (tests/core/stand_in.c) is this device's driver from now on.
void
use_driver(const std::string &path)
{
    struct Table { // as stand_in.h has it
        void (*fail)(const char *, int, int);
        bool (*failed)();
        void (*hold)(bool);
        void (*launch)(void *, void (*)(void *), void *);
        void (*set_drain)(void (*)());
        int (*alive)();
    };
    void *library = dlopen(path.c_str(), RTLD_NOW);

    TORCH_CHECK(library != nullptr, path, ": ", dlerror());
    driver_synchronize =
        reinterpret_cast<int (*)(void *)>(dlsym(library, "cuStreamSynchronize"));
    static_cast<const Table *>(dlsym(library, "stand_in"))->set_drain(&run_all);
    const auto find = [&](auto &function, const char *name) {
        function =
            reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    };
    std::lock_guard<std::mutex> guard(queue_lock);
    find(driver_memory.push, "cuCtxPushCurrent_v2");
    find(driver_memory.pop, "cuCtxPopCurrent_v2");
    find(driver_memory.alloc, "cuMemAlloc_v2");
    find(driver_memory.free, "cuMemFree_v2");
}

void
use_driver_memory(bool used)
{
    std::lock_guard<std::mutex> guard(queue_lock);

    driver_memory.used = used;
}

TORCH_LIBRARY(pretend, m)
{
    m.def("use_driver(str path) -> ()", &use_driver);
    m.def("use_driver_memory(bool used) -> ()", &use_driver_memory);
    m.def("late_copies() -> int", &late_copies);
    m.def("set_sync_debug_mode(int mode) -> ()", &set_sync_debug_mode);
    m.def("get_sync_debug_mode() -> int", &get_sync_debug_mode);
    m.def("manual_seed(int seed) -> ()", &manual_seed);
    m.def("get_rng_state() -> Tensor", &get_rng_state);
    m.def("set_rng_state(Tensor state) -> ()", &set_rng_state);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
    static Hooks hooks;

    c10::SetAllocator(TYPE, &allocator);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
}();

} // namespace
