"""Plans of `dtk plan --model`: how to divide each layer of one model.

    graph          the operators of a Keras model, layer by layer
    layer_times    measured seconds of computing a layer
    layer_costs    a layer, divided in one way, on a grid of ranks: seconds, bytes, memory
    search         the fastest division of each layer, or into stages, on each grid
    reasons        the printed tables and reasons
    plans          the file of the best plan, for `dtk.planning.load_plan`

After Jia, Zaharia and Aiken 2018, "Beyond Data and Model Parallelism for Deep Neural Networks"
(FlexFlow, arXiv:1807.05358), whose four dimensions are these:

    sample       rows of the batch, over the replicas of the grid
    operator     layers, over the stages of a pipeline
    attribute    rows or columns of an image
    parameter    output or input channels of a layer

Only `graph` and `layer_times` use Keras. The errors of predictions are in
benchmarks/results/plan_model.md.
"""
